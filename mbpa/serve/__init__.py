"""A classifier as an HTTP service that learns from examples and never loses one.

`serve_model` serves an `MbPA` model; `make_run` only writes the run directory that `mbpa serve`
serves.
"""

from mbpa.serve.own_model import make_run, serve_model

__all__ = ["make_run", "serve_model"]
