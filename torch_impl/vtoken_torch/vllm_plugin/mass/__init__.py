"""Attention mass inside vLLM, for the policies that score tokens by it (SPEC A-3).

    requests        opens a line in the book for each request whose policy asks for mass
    feed            scheduler's side: notes which position lies where in each pass, and who asks (``StepRecord.mass``)
    attention       worker's side: vLLM's attention, and after each layer a word to the collector; ``_cpu``, ``_device``
    collector       sums up the step over layers and ranks, with ``queries``, and reports it with the step's result
    feed            reads what came back into the book, by position
    book            what the policies read; ``victims`` says when they are asked, and about which tokens

A step without such a request passes all of this by, and vLLM's attention is its own until the first one comes. The
masses are float32: summed over query heads and tensor-parallel ranks, mean over layers.
"""
