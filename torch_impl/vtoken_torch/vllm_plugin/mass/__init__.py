"""Attention mass inside vLLM, for the policies that score tokens by it (SPEC A-3). It stays where it is collected.

    requests        opens a line in the book for each request whose policy asks for mass
    feed            scheduler's side: orders with each pass (``StepRecord.mass``): where a step's tokens lie, whose mass
                    counts, and the question whose answer the next choice needs
    keeper          worker's side: carries the orders out, with
    attention         vLLM's attention, and after each layer a word to the collector; ``_cpu``, ``_device``, ``backend``
    collector         which sums up the step over layers and ranks, with ``queries``
    kept              each request's mass by packed index, moved as its tokens are; it ranks, and names the victims
    book            scheduler's side: which answer serves which choice; ``victims`` says when a policy is asked, about
                    which tokens, and what to ask before

A step without such a request passes all of this by, and vLLM's attention is its own until the first one comes. The
masses are float32: summed over query heads and tensor-parallel ranks, mean over layers; sums of them are float64.
"""
