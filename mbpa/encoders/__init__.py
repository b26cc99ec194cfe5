"""Encoders that turn texts and pictures into keys."""
