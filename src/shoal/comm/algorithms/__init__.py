"""Collectives from point-to-point messages: tables of `shoal.collectives`, chosen by measured links, on live ranks."""
