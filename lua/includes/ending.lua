-- ending(request, events, finished, length, reason, keep, prefill, cached): ends a request of the log,
-- whose sequence has `length` tokens, and tells its readers why. The first three are keys; `keep`
-- are the seconds for which the log keeps the request from now on; `prefill` is what its first
-- token took in nanoseconds and `cached` how many tokens of its prompt were in KV, each nil or '' if
-- that is not known. The caller has taken it off the lists.
local function ending(request, events, finished, length, reason, keep, prefill, cached)
  redis.call('HSET', request, 'reason', reason)
  local entry = { 'reason', reason }
  if prefill and prefill ~= '' then
    entry[#entry + 1], entry[#entry + 2] = 'prefill_ns', prefill
  end
  if cached and cached ~= '' then
    entry[#entry + 1], entry[#entry + 2] = 'cached', cached
  end
  redis.call('XADD', events, length .. '-1', unpack(entry))
  redis.call('INCR', finished)
  redis.call('EXPIRE', request, keep)
  redis.call('EXPIRE', events, keep)
end
