-- report: adds what a rank has to say about a request.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  reports of the request
-- ARGV[1]  epoch of the caller
-- ARGV[2]  id of the request
-- ARGV[3]  rank
-- ARGV[4]  report (opaque)
-- ARGV[5]  seconds for which the log keeps the reports from now on
-- Reply    1
-- Errors   STALE
--          REQUEST  unknown
--- @include "fence"
--- @include "request"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  return unknown(ARGV[2])
end
local number = redis.call('XLEN', KEYS[3]) + 1
redis.call('XADD', KEYS[3], number .. '-0', 'rank', ARGV[3], 'report', ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[5])
return 1
