-- report: adds the report of a rank on a request.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  reports of the request
-- ARGV[1]  epoch of the caller
-- ARGV[2]  rank
-- ARGV[3]  report (opaque)
-- ARGV[4]  seconds for which the log keeps the reports from now on
-- Reply    1; 0: the log no longer has the request, so the report is dropped
-- Errors   STALE
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  return 0
end
local number = redis.call('XLEN', KEYS[3]) + 1
redis.call('XADD', KEYS[3], number .. '-0', 'rank', ARGV[2], 'report', ARGV[3])
redis.call('EXPIRE', KEYS[3], ARGV[4])
return 1
