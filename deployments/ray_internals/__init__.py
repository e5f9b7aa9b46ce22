"""All uses of Ray's private parts, a file each. The other rooms import these files and Ray's public names only.

The docstring of each file has four parts: what Ray 2.60 does, why Raylens needs something else, which test fails when
Ray changes, and what would let us delete the file."""
