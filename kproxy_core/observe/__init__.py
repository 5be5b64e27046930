"""What operators observe: metrics, health, logs and events. Decides nothing about packets."""
