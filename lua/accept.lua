-- accept: appends accepted tokens to a request and shows them to its readers.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  events of the request
-- ARGV[1]  epoch of the caller
-- ARGV[2]  id of the request
-- ARGV[3]  base: length of the sequence before the tokens
-- ARGV[4]  tokens, joined by spaces
-- Reply    how many tokens were appended
-- Errors   STALE
--          REQUEST  unknown, finished, or base beyond the end of the sequence
--
-- Idempotent: tokens at positions that the sequence already has are skipped.
--- @include "fence"
--- @include "request"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local known = redis.call('HMGET', KEYS[2], 'length', 'reason')
local length, base = tonumber(known[1]), tonumber(ARGV[3])
if not length then
  return unknown(ARGV[2])
end
if base > length then
  return refuse('REQUEST', 'request ' .. ARGV[2] .. ' has ' .. length .. ' tokens, and none can be accepted at ' .. base)
end
local fresh, position = {}, base
for token in string.gmatch(ARGV[4], '%S+') do
  if position >= length then
    fresh[#fresh + 1] = token
  end
  position = position + 1
end
if #fresh == 0 then
  return 0
end
if known[2] then
  return refuse('REQUEST', 'request ' .. ARGV[2] .. ' is finished (' .. known[2] .. ')')
end
redis.call('HSET', KEYS[2], 'length', position)
redis.call('XADD', KEYS[3], position .. '-0', 'base', length, 'tokens', table.concat(fresh, ' '))
return #fresh
