-- attach: a rank takes part in an epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  ranks of the epoch (hash: rank, process id)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  rank
-- ARGV[3]  process id
-- Reply    1
-- Errors   STALE
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return 1
