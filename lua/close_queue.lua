-- close_queue: says that no request will follow those in the queue, in this epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  whether the queue is closed
-- ARGV[1]  epoch of the caller
-- ARGV[2]  prefix of the keys of an epoch, as of new_epoch
-- Reply    1
-- Errors   STALE
--
-- The head is told (includes/arrived.lua).
--- @include "fence"
--- @include "arrived"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('SET', KEYS[2], 1)
arrived(ARGV[2], ARGV[1])
return 1
