-- accept: appends accepted tokens to a request and shows them to its readers.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  events of the request
-- ARGV[1]  epoch of the caller
-- ARGV[2]  id of the request
-- ARGV[3]  base: length of the sequence before the tokens
-- ARGV[4]  tokens, joined by spaces
-- ARGV[5]  notes on the tokens (opaque words, one per token), joined by spaces; or nothing
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
local function fresh_part(words)
  local part, position = {}, base
  for word in string.gmatch(words, '%S+') do
    if position >= length then
      part[#part + 1] = word
    end
    position = position + 1
  end
  return part
end
local fresh, notes = fresh_part(ARGV[4]), fresh_part(ARGV[5])
if #fresh == 0 then
  return 0
end
if known[2] then
  return refuse('REQUEST', 'request ' .. ARGV[2] .. ' is finished (' .. known[2] .. ')')
end
local position = length + #fresh
local entry = { 'base', length, 'tokens', table.concat(fresh, ' ') }
if #notes > 0 then
  entry[5], entry[6] = 'notes', table.concat(notes, ' ')
end
redis.call('HSET', KEYS[2], 'length', position)
redis.call('XADD', KEYS[3], position .. '-0', unpack(entry))
return #fresh
