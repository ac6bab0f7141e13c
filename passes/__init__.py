"""Graph rewrites, ``ir.Model`` to ``ir.Model``: one module and one class each.

No pass reads a file, opens a session or prints. A pass that cannot do its work says why:
`PreconditionError` before it has changed anything.
"""
