"""A coverage-guided fuzzer for the code that reads outside input: requests, files, pictures.

`file_targets` and `request_target` define what is called and what must hold. `mutators` derives new
inputs from old ones, `engine` keeps those that reach new code, and `isolation` runs everything in
processes that may die.
"""
