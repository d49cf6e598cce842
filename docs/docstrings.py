"""How the site reads docstrings, as `mkdocs.yml` asks; griffe calls it for every object.

The docstrings write "Example:" for one or several, and griffe knows "Examples:".
"""

import re

import griffe


class Docstrings(griffe.Extension):
    """Sections by the names that griffe knows."""

    def on_object(self, *, obj, **_):
        """Once for each module, class, function and attribute."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^( *)Example:$", r"\1Examples:", text)
