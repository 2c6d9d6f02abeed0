"""Linear layers: `fxsplit::linear` computes one and its activation by a kernel that was measured;
`fxsplit::fixed_linear` (`products.fixed`) adds in one order however many rows it gets.
"""
