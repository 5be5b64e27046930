"""The mode as people look at it: rules as text, the way of a packet, counts. Changes nothing."""
