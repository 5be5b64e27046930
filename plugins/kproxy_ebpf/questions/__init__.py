"""Answers to the questions that the core asks every plugin, clean-ups included. Nothing here serves."""
