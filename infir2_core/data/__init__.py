"""Text to tokens to batches.

Reading order: tokenizer.py (text to ids), sources.py (files to documents), prepare.py with parts.py (documents to a
Megatron `.bin/.idx` corpus), prefixes.py (finding and checking corpora), corpus.py (corpora, blended and split, as
training sequences), show.py (what is in one). Chat: chat_source.py with chat_record.py (files to conversations),
chat_template.py (to ids and what of them is trained), chat_set.py (tokenised once, read by number), packing.py (samples
to flat batches), docstrings.py (a set to try). Nothing here imports torch before data is opened for training or a chat
template is loaded.
"""
