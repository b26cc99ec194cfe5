"""A coverage-guided fuzzer for the code that reads what others wrote: requests, files, pictures.

`file_targets` and `request_target` say what is called and what must hold, `mutators` derives new
inputs from old ones, `engine` keeps those that reach new code, `isolation` runs all of it in
processes that may die.
"""
