"""``vllm-mc2 bench serve``: real vLLM servers, hand-off against hand-off, one request at a time in turns.

* ``arguments``: the command line; ``settings``: what it means.
* ``systems``: what is compared, and how each one hands over; ``fleet``: their servers, of which only those
  whose turn it is may run; ``models``: the random model with much KV per token.
* ``client``: one request; ``rounds``: time to first token; ``load``: several requests at once;
  ``footprint``: idle CPU and memory.
* ``results``: what was measured; ``checks``, ``report``, ``charts``: what is made of it.

Importing this package imports nothing heavy.
"""
