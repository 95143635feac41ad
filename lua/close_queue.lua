-- close_queue: marks the queue of this epoch as complete: no further request will be added.
--
-- KEYS[1]  epoch
-- KEYS[2]  whether the queue is closed
-- ARGV[1]  epoch of the caller
-- ARGV[2]  prefix of the keys of an epoch, as of new_epoch
-- Reply    1
-- Errors   STALE
--
-- The head is notified (includes/notify_head.lua).
--- @include "fence"
--- @include "notify_head"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('SET', KEYS[2], 1)
notify_head(ARGV[2], ARGV[1])
return 1
