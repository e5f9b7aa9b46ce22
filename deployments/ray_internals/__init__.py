"""All uses of Ray's private parts. The other rooms import these files and Ray's public names only.

Each file's docstring tells Ray 2.60's behaviour, the need, the tests that fail when Ray changes, and the way back."""
