"""The live page of `shoal watch`: what run directories say, followed while they grow, in a browser.

`live_run.LiveRun` follows one run directory and keeps a bounded picture of it, however long the run and however many
its ranks; `server.open_page` serves one or several of them to whoever holds the token.
"""
