"""What ``vllm-mc2 doctor`` looks at. Each module looks at one part and returns findings; ``examination`` calls them all.

What can be tried harmlessly is tried, with the code that an engine uses; nothing is concluded from a version number.
"""
