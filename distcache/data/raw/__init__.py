"""From raw Criteo text to memory-mapped arrays, in bounded memory, on all cores, restartable.

`job` is the table of contents: parts of the text are parsed (`part`), their counts merged
(`count`, `vocabulary`), and the parts assembled into arrays (`assemble`) that a `manifest`
describes. Nothing here imports torch: the work is done in many small processes.
"""
