"""Kubernetes protobuf to the structs of `objects.wire`. Imported only once a server answers in protobuf."""
