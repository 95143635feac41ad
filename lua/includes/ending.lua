-- ending(request, events, finished, length, reason, keep): ends a request of the log, whose
-- sequence has `length` tokens, and tells its readers why. The first three are keys; `keep` are
-- the seconds for which the log keeps the request from now on. The caller has taken it off the
-- lists.
local function ending(request, events, finished, length, reason, keep)
  redis.call('HSET', request, 'reason', reason)
  redis.call('XADD', events, length .. '-1', 'reason', reason)
  redis.call('INCR', finished)
  redis.call('EXPIRE', request, keep)
  redis.call('EXPIRE', events, keep)
end
