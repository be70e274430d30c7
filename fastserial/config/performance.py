"""The sizes that performance depends on, each with its measurement. In bytes, unless noted.

Measured on a virtual machine with 2 cores, 24 GiB and a virtio disk of 1.2 to 2.1 GB/s (ext4), and
on XFS in memory of 3.0 to 3.4 GB/s. Options of `Config` can be set by the user; the
others here cannot.
"""

from __future__ import annotations

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

PAGE = 4 * KiB  # of memory and of direct I/O, even where a device takes sectors of 512 bytes

# -- defaults of options ---------------------------------------------------------------------------

# Together 12 MiB: what is filled is still in the processor's cache when the device takes it. Cold
# reads of 2 GiB reach 1.25 times fio's speed with these, 1.31 with four blocks of 8 MiB.
BLOCK_SIZE = 2 * MiB
QUEUE_DEPTH = 6
THREADS = 6
# Up to here one write through the page cache was faster than an engine with threads and buffers,
# and torch itself than reading ahead.
SMALL_FILE = 8 * MiB

# -- page cache and disk ---------------------------------------------------------------------------

# A block of which this part is in the page cache is read through it (12 GB/s); of less, the rest
# would be read in small pieces. Verifying 1 GiB took as long with 0.5: 0.57 s cold, 0.17 s cached.
MOSTLY_CACHED = 0.9
ALWAYS_FITS = 64 * MiB  # asking what is free takes 0.3 ms
# So much of a device's first large save is timed: a throttle or a disk's cache takes less at once.
TRIAL = 16 * MiB
# Bytes a second. Through the page cache 2 cores save about 1 GB a second, so a device of half that
# speed is waited for in any case; a faster one is written to directly.
FAST_DEVICE = 400e6
# Seconds for which a device that was slow counts as slow: it may have been busy. To measure it
# again costs no more than `TRIAL` bytes that are waited for.
SLOW_FOR = 60.0
# ... and a fast one as fast: it may have used up what a cloud lends it for a while, or be shared
# with more. A trial made a save of 512 MiB take 0.08 s longer (of 0.4 s, median of ten pairs on a
# busy machine).
FAST_FOR = 300.0
LARGE_FILE = 64 * MiB  # to free a replaced file of less takes 0.1 ms on ext4, no more than a thread

# -- saves -----------------------------------------------------------------------------------------

# Copy and checksum take turns, while the bytes are in a core's cache: 7.0 GB/s on one core, 6.2
# with 64 KiB, 7.4 with 2 MiB where that much fits; less CPU time than with whole blocks. Small
# files are written in such chunks: 1 MiB took 2.7 ms, with 96 KiB 4.0, and 3.8 where storages were
# written without a copy.
FILL_CHUNK = 256 * KiB
# Small storages are copied twice, together, but without a step of Python's for each. With 60 KB it
# took as much CPU time as copies of their own (0.10 s for 180 MB), with 12 KB less.
PACKED_STORAGE = 64 * KiB  # a storage up to this size may be packed with others,
PACKED_BYTES = 512 * KiB  # into pieces of about this size: a few calls for hundreds of storages
MOST_PIECES = 512  # of one `preadv`; the kernel takes 1024
CLONED_PIECE = 8 * MiB  # of a file is compared with memory, and cloned if it is the same
GATHERED = 64 * KiB  # small writes are gathered up to this size
COPIED_RECORD = 64 * KiB  # a larger record, such as the pickle of arrays, is not copied, nor are
# storages of more together, with 1 KiB for each; smaller ones need no checksums at the end
# Seconds for which a thread that computes in Python keeps the interpreter's lock while a save moves
# blocks, instead of 5 ms: each step of the save asks for the lock anew. Beside such a thread 300 MB
# in memory took 1.2 to 1.7 s, with 5 ms 1.7 to 2.9 (stock 1.9 to 3.5), on a busy machine.
SWITCH_INTERVAL = 0.2e-3
# CPU cores up to which the submitting thread fills all blocks: two copies at a time took the cores
# that kernel and device need, 15 to 30 % of the speed of a save on 2 cores.
FEW_CORES = 4

# -- devices ---------------------------------------------------------------------------------------

# Not measured. A ring holds the blocks that are written and as many that are on their way from the
# device; one save and one load may have one each.
PINNED_RING = 32 * MiB
PINNED_MOST = 64 * MiB
THROUGH_RING = 1 * MiB  # a copy of less is over before a ring is set up

# -- loads -----------------------------------------------------------------------------------------

# Direct reads of at least this size go to their target; smaller ones share a staging buffer.
IN_PLACE = 512 * KiB
NEAR_EXTENTS = 128 * KiB  # bytes not wanted that are read rather than split a read in two
UNSTAGED = 64 * KiB  # pieces from here on are worth a read of their own, without a copy
# Through the page cache one call reads all records of a block, each to its memory. 300 in
# 100 MB took the caller 14 ms so, with reads and copies of their own 35.
SCATTERED_BLOCK = 16 * MiB
READ_TOGETHER = 16 * MiB  # of neighbours; the larger, the more of their memory is on huge pages
# A file that is not in the page cache is read in lanes (`loading.pump`), blocks of each in order:
# `torch.load` of 1 GiB took 0.78 s with these (stock 0.87), 0.84 to 0.85 with 3 of 32 or 6 of 16
# MiB, and 1.05 with six threads on one descriptor.
LANES = 4
LANE_SPAN = 32 * MiB
DIRECT_BLOCKS = 4  # blocks in one read that needs no buffer: fewer turns for the interpreter
LOOK_AHEAD = 256 * MiB  # read and not yet asked for
# Files of so many times `small_file` are left to torch: starting threads and touching new memory
# takes longer than is gained. 16 MiB took torch 11 to 13 ms uncached and us 16 to 20; 9 to 32 MiB
# took it 5 to 13 ms cached and us 7 to 25. 64 MiB took it 24 to 29 ms cached and us 14 to 21.
SMALL_LOAD = 2
SMALL_CACHED_LOAD = 4
# To a device, before memory is pinned and streams are made, which a first load would have to do. On
# an H100, beside other work, 32 MiB took torch 53 ms and us 109.
SMALL_DEVICE_LOAD = 8
FEW_BYTES = 32 * KiB  # per record on average: finding them costs us more than reading them torch
SHORT_LOAD = 4096 * MiB  # cycles of other threads may wait for collection as long as that takes
CONTIGUOUS_RUN = 64 * KiB  # of a tensor's part; from here on it is read by itself
SCATTERED_CHUNK = 32 * MiB  # memory for the parts of a scattered tensor
STREAM_CHUNK = 256 * KiB  # a pickle is read in pieces of this size

# -- huge pages ------------------------------------------------------------------------------------

HUGE_PAGE = 2 * MiB
# One huge page of this many bytes is timed. Touching one takes 0.2 to 0.5 ms, where a hypervisor
# took the memory back 2 to 6 ms: small pages (1 to 2 ms for as many bytes) are better then. One
# thread touches it, readers would in parallel: 1 GiB from the page cache came in 156 ms with four
# times as many timed, in 130 so.
TIMED_STEP = 16 * HUGE_PAGE
SLOW_TOUCH = 1.5e-3  # seconds
SLOW_TOUCHES = 2  # a single one may be chance
