"""A classifier as a service that learns what it is told and never loses it."""
