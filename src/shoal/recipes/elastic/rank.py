"""One replica of an elastic run: it takes part in one generation after the other, and carries its state over.

    a generation ends     between two steps, because one joins or leaves: all learn it in the vote of the same step
                          in a step, because a replica is lost: its peers' collective fails
    the next one begins   groups, gradients and step are built anew; process, data and state stay

A step counts for a replica when its optimizer has made the whole update. One that fails before has changed nothing but
buffers, which are taken back; one that fails within has left no state to go on from, and the replica copies another's.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from io import TextIOWrapper
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from shoal.comm.board import Board
from shoal.coordinator.client import Begin, Client
from shoal.engine.loop import Job, steps
from shoal.engine.step_result import StepResult
from shoal.errors import CollectiveError, Stopped
from shoal.launch.environment import LOOPBACK, Place
from shoal.launch.failure import is_secondary
from shoal.launch.rendezvous import STARTED, Rendezvous, connect_store
from shoal.launch.signals import StopRequest
from shoal.launch.sockets import listen_on_loopback
from shoal.maths.fingerprint import fingerprint
from shoal.observe.ending import ending_of
from shoal.observe.facts import write_facts
from shoal.observe.sink import Sinks
from shoal.recipes.elastic.exchange import GenerationExchange
from shoal.recipes.elastic.membership_log import MembershipLog
from shoal.recipes.elastic.seat import Seat, seat_from
from shoal.recipes.elastic.state_copy import HeldState, held_state, load_state, share_state
