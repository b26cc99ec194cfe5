"""The experiment behind `mbpa demo`: a network that knows five digits meets all ten."""
