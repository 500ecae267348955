"""How does every framework start an attention layer, and does it matter?"""
