"""The HTTP pages and the server that answers them."""
