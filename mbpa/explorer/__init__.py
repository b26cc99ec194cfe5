"""A web page that shows why a classifier answers as it does, and lets visitors teach it."""
