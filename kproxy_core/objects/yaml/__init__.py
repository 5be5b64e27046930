"""YAML as plain values: by lines where it is as plain as what kubectl writes, else from libyaml's events."""
