"""Kubernetes objects from JSON or YAML to the model. No other room knows the API's wire format."""
