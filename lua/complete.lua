-- complete: records tasks as complete, and announces what that makes ready.
--
-- KEYS[1]  epoch
-- KEYS[2]  graph (see includes/task.lua; keys derived from it share its hash tag)
-- KEYS[3]  ready lists
-- ARGV[1]  epoch of the caller
-- ARGV[2]  most steps that may have a record at once
-- ARGV[3]  payload, the result of each of the tasks
-- ARGV[4..] task ids
-- Reply    1
-- Errors   STALE
--          GRAPH  a task that is complete already, or is not one of its submitted step, or is
--                 of a step far ahead of what was submitted
--
-- A task may be completed before its predecessors are, and before its step is submitted; it is then
-- never announced. The payloads of predecessors are concatenated in the order of completion.
--- @include "fence"
--- @include "task"
--- @include "retire_steps"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local graph = KEYS[2]
local bounds = redis.call('HMGET', graph, 'floor', 'last')
local floor, last = tonumber(bounds[1]), tonumber(bounds[2])

local ids, early = {}, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local rank, step = rank_and_step(id)
  if not step then
    return refuse('GRAPH', id .. ' is not the id of a task')
  end
  local number = tonumber(step)
  local state = redis.call('HGET', graph .. ':' .. step, id)
  local twice = state and string.sub(state, 1, 1) == 'D' or floor and number < floor or ids[id]
  if twice then
    return refuse('GRAPH', 'task ' .. id .. ' is complete already')
  end
  if not state then
    if last and number <= last then
      return refuse('GRAPH', 'task ' .. id .. ' is not one of step ' .. step)
    end
    if last and number - floor >= tonumber(ARGV[2]) then
      return refuse('GRAPH', 'task ' .. id .. ' is far ahead of the last submitted step ' .. last)
    end
    early[#early + 1] = step
  end
  ids[#ids + 1] = id
  ids[id] = true
end

for _, step in ipairs(early) do
  redis.call('SADD', graph .. ':steps', step)
end
local payload = ARGV[3]
local counts = {} -- of completed tasks, by step
for _, id in ipairs(ids) do
  local _, step = rank_and_step(id)
  local record = graph .. ':' .. step
  local waiting = redis.call('HGET', record, id .. '>')
  redis.call('HSET', record, id, 'D' .. payload)
  counts[step] = (counts[step] or 0) + 1
  for successor in string.gmatch(waiting or '', '%S+') do
    local rank, its_step = rank_and_step(successor)
    local its = graph .. ':' .. its_step
    local known = redis.call('HMGET', its, successor, successor .. '$')
    local state = known[1]
    -- Its owner may have completed it already; then no rank waits for it.
    if string.sub(state, 1, 1) ~= 'D' then
      local gathered = (known[2] or '') .. payload
      if redis.call('HINCRBY', its, successor .. '#', -1) > 0 then
        if payload ~= '' then
          redis.call('HSET', its, successor .. '$', gathered)
        end
      elseif state == 'a' then
        redis.call('RPUSH', KEYS[3] .. ':' .. rank, successor .. ' ' .. gathered)
      end
    end
  end
end
retire_steps(graph, counts, floor, last)
return 1
