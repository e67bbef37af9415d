"""The Python that loading the library installs. The library embeds these files and runs its own copies under
these names (library.py), with the package on the path or without, so this file itself is never run."""
