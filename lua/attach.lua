-- attach: a rank takes part in an epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  ranks of the epoch (set)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  rank
-- Reply    1
-- Errors   STALE
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('SADD', KEYS[2], ARGV[2])
return 1
