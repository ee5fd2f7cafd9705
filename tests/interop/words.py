"""The words of a peer; apart from it, since importing the SDK takes seconds."""

WORDS = ("ähre", "zwölf \u2028\t🦊", '"quoted" \\n')
