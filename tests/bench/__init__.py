"""Measurements of parts that stand by themselves."""
