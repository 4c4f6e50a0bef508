"""Instructions that CUTLASS has no function for, as inline PTX."""

import cutlass.cute as cute
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def ptx(text: str, *operands, results=(), loc=None, ip=None):
    """Issue the instructions of ``text``. Return the result, or a tuple of several, of the types ``results``.

    The text names operands {$r0}, {$r1} and so on, and results {$w0}, {$w1} and so on.
    """
    return cute.arch.inline_ptx(text, write_only_types=[*results], read_only_args=[*operands], loc=loc, ip=ip)
