"""Element types of operands in memory: one row for each."""

from __future__ import annotations

from dataclasses import dataclass

# A halfword has 16 bits. Kernels count the columns of tiles and the strides of operands in halfwords, for elements of
# any width.
HALFWORD_BYTES = 2
INTERLEAVED_TOKENS = 4  # tokens whose V scales are neighbours in NVFP4 caches of prefill
SCALE_COLUMNS = 128  # e4m3 elements of a row of 656 bytes per float32 scale; the scales lie behind the elements


@dataclass(frozen=True)
class Element:
    """An element type of Q, K, V or the output.

    Attributes:
        name: the type's name in names of kernels and in messages.
        bits: the width of an element in memory.
        block: neighbouring elements of a row that share a scale, which lies in a tensor of its own; 0 without scales.
        scale: the name of the type of these scales.
        dequantized: whether kernels can convert it to the 16-bit type of the queries before the product.
    """

    name: str
    bits: int
    block: int = 0
    scale: str = ""
    dequantized: bool = False

    @property
    def storage_bytes(self) -> int:
        """Bytes of the unit that strides count: one element, or two 4-bit elements."""
        return max(self.bits // 8, 1)

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of ``elements`` neighbouring elements, without their scales.

        Raises:
            ValueError: the elements do not fill whole bytes.
        """
        size, rest = divmod(elements * self.bits, 8)
        if rest:
            raise ValueError(f"{elements} elements of {self.name} are not a whole number of bytes")
        return size

    def scales_of(self, elements: int) -> int:
        """Return the number of scales of a row of ``elements`` elements.

        Raises:
            ValueError: the row does not consist of whole blocks.
        """
        if not self.block:
            return 0
        if elements % self.block:
            raise ValueError(f"a row of {elements} elements of {self.name} is not made of blocks of {self.block}")
        return elements // self.block


ELEMENTS = {
    element.name: element
    for element in (
        Element("bf16", 16),
        Element("fp16", 16),
        Element("e4m3", 8, dequantized=True),
        Element("int8", 8, dequantized=True),
        Element("fp8_ds_mla", 8, dequantized=True),  # scales inside a row, see parts/dequant/latent_rows.py
        Element("nvfp4", 4, block=16, scale="e4m3", dequantized=True),
    )
}
