-- refuse(code, detail) -> the error reply "<code> <detail>".
--
-- The codes, and the exceptions they become, are the table ERRORS in
-- pipespec/controller/lua_scripts.py:
--   STALE    the caller belongs to an epoch that is over
--   GRAPH    a task, an edge or a step is not valid
--   FULL     no further request can be stored now
--   REQUEST  the request log does not have the request, or it is in another state
local function refuse(code, detail)
  return redis.error_reply(code .. ' ' .. detail)
end
