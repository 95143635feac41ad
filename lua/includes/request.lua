--- @include "refuse"

-- The keys of a request; <request> is "<prefix>:<id>". They are the only durable state.
--
--   <request>          hash    own: what is not in common with others (opaque) and shared: the
--                              number of the request that has what is, both until it ends;
--                              length: tokens of the sequence so far, prompt included;
--                              prompt: tokens of the prompt;
--                              reason: why it finished, if it has;
--                              cancelled: the reason with which the head is to end it, if so;
--                              tenant: whose request it is, '' if not said;
--                              scored: the end of the prompt's published log-probabilities;
--                              stuck: how many clusters in a row have failed while they
--                              decoded it, without a token beyond the length stuck_at
--   <request>:events   stream  an entry "<length after it>-0" per accepted piece, with base
--                              and tokens, and logprobs if requested (opaque, one text per
--                              token); the last entry is "<length>-1" with reason, and with
--                              prefill_ns and cached if the head knows them. The first entries,
--                              if the request wants log-probabilities of its prompt, are
--                              "<position>-0" with base and logprobs
--   <request>:reports  stream  an entry per report of a rank
--   <request>:shared   hash    spec: what it and those after it have in common (opaque); left: how
--                              many of them have not ended; it goes with the last one
--
-- Two sorted sets hold the ids of the requests that wait (queue.lua) and of those that an epoch has
-- admitted, each with the score priority * 2^32 + id: the lowest priority value is first, and among
-- equal ones the oldest request.
--
-- unknown_request(id) -> the error reply for a request that the log does not have.
local function unknown_request(id)
  return refuse('REQUEST', 'request ' .. id .. ' is not in the log')
end
