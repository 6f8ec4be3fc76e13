"""Gemini `generateContent` and `streamGenerateContent`. Later.

Known already: usage is `usageMetadata` on any chunk, the last one wins; nothing may be sent while a
client waits, because a comment is a parse exception in google-genai; errors come as a list.
"""
