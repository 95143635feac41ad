-- publish_step: publishes a step of the head to dashboards.
--
-- KEYS[1]  epoch
-- KEYS[2]  steps (stream; an entry per step)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  how many entries are kept
-- ARGV[3]  seconds for which they are kept from now on
-- ARGV[4..] fields and values (opaque)
-- Reply    1
-- Errors   STALE
--
-- It is of no use after a restart, so it goes neither to the append-only file nor to replicas.
redis.set_repl(redis.REPL_NONE)
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[2], '*', 'epoch', ARGV[1], unpack(ARGV, 4))
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
