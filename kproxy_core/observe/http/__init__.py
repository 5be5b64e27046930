"""The HTTP server and its pages."""
