"""A page that shows why a classifier answers as it does, and takes lessons."""
