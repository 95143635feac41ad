-- close_queue: says that no request will follow those in the queue, in this epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  counter of requests
-- KEYS[3]  arrivals (stream; wakes who waits for a request)
-- KEYS[4]  whether the queue is closed
-- ARGV[1]  epoch of the caller
-- Reply    1
-- Errors   STALE
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('SET', KEYS[4], 1)
-- The stream's ids are those of requests: spend one.
local id = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, id .. '-0', 'closed', 1)
return 1
