-- accept: appends accepted tokens to requests and publishes them to their readers.
--
-- KEYS[1]  epoch
-- KEYS[2]  prefix of a request's keys
-- ARGV[1]  epoch of the caller
-- ARGV[2..] for each piece four:
--          id of the request
--          base: length of the sequence before the tokens
--          tokens, joined by spaces
--          log-probabilities of the tokens (opaque, one text per token), joined by spaces; or
--          empty
-- Reply    how many tokens were appended
-- Errors   STALE
--          REQUEST  unknown, finished, or base beyond the end of the sequence
--
-- Idempotent: tokens at positions that the sequence already has are skipped. Several pieces may
-- be of one request, in their order.
--- @include "fence"
--- @include "request"
--- @include "split_words"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end

-- Everything is checked before anything is written, so that a refusal changes nothing.
local lengths, reasons, pieces = {}, {}, {}
for i = 2, #ARGV, 4 do
  local id, base = ARGV[i], tonumber(ARGV[i + 1])
  if not lengths[id] then
    local known = redis.call('HMGET', KEYS[2] .. ':' .. id, 'length', 'reason')
    if not known[1] then
      return unknown_request(id)
    end
    lengths[id], reasons[id] = tonumber(known[1]), known[2]
  end
  local length = lengths[id]
  if base > length then
    return refuse('REQUEST', 'request ' .. id .. ' has ' .. length .. ' tokens, and none can be accepted at ' .. base)
  end
  local fresh = split_words(ARGV[i + 2], length - base)
  if #fresh > 0 then
    if reasons[id] then
      return refuse('REQUEST', 'request ' .. id .. ' is finished (' .. reasons[id] .. ')')
    end
    local entry = { 'base', length, 'tokens', table.concat(fresh, ' ') }
    local logprobs = split_words(ARGV[i + 3], length - base)
    if #logprobs > 0 then
      entry[5], entry[6] = 'logprobs', table.concat(logprobs, ' ')
    end
    lengths[id] = length + #fresh
    pieces[#pieces + 1] = { id, lengths[id], entry, #fresh }
  end
end

local count = 0
for _, piece in ipairs(pieces) do
  local request = KEYS[2] .. ':' .. piece[1]
  redis.call('HSET', request, 'length', piece[2])
  redis.call('XADD', request .. ':events', piece[2] .. '-0', unpack(piece[3]))
  count = count + piece[4]
end
return count
