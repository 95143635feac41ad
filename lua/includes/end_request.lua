--- @include "memory"

-- end_request(request, events, finished, length, reason, keep, prefill, cached): ends a request of
-- the log, whose sequence has `length` tokens, and publishes the reason to its readers. The first
-- three are keys; the log keeps the request for `keep` seconds from now on; `prefill` is the time to
-- its first token in nanoseconds, and `cached` the number of prompt tokens that were in the prefix
-- cache, each nil or '' if not known. The caller has removed the request from the sorted sets. What it
-- shares with others goes with the last of them. Where memory is short, it is kept for a minute.
local function end_request(request, events, finished, length, reason, keep, prefill, cached)
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
  local number = redis.call('HGET', request, 'shared')
  if number then
    local shared = request:gsub('%d+$', number) .. ':shared'
    if redis.call('HINCRBY', shared, 'left', -1) < 1 then
      redis.call('DEL', shared)
    end
    redis.call('HDEL', request, 'own', 'shared')
  end
  if memory_share() > 0.5 then
    keep = math.min(keep, 60)
  end
  redis.call('EXPIRE', request, keep)
  redis.call('EXPIRE', events, keep)
end
