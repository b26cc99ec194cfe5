"""mbpa behind the interfaces of other libraries, one module and one extra per library."""
