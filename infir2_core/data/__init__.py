"""Text to tokens to batches.

Reading order: tokenizer.py (text to ids), sources.py (files to documents), prepare.py with parts.py (documents to a
Megatron `.bin/.idx` corpus), prefixes.py (finding and checking corpora), corpus.py (corpora, blended and split, as
training sequences), show.py (what is in one). Nothing here imports torch before a corpus is opened for training or
written.
"""
